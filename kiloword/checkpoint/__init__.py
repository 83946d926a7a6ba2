"""Resumable states: `state/step-N/` holds a safetensors file of every rank, `state/step-N.json` numbers and checksums.

The json comes last: without it the state does not exist. Files are what `HuggingFaceStorageWriter` of
`torch.distributed.checkpoint` writes with `save_distributed=True`: its reader and its planner load them on any number
of ranks, sharded or not.
"""
