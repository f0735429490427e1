"""Collectives and messages through torch.distributed: gloo and NCCL."""
