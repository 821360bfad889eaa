"""Attention kernels. The contract, and the steps to add a kernel, are in contract.py."""
