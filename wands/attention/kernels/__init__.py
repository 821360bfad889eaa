"""Attention kernels. The module contract.py describes the interface of a kernel and the steps to add a kernel."""
