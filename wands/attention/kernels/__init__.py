"""Attention kernels. The module contract.py describes their interface and the steps to add a kernel."""
