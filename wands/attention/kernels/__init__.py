"""Attention kernels. The module contract.py describes the interface of a kernel."""
