"""Checkpoints by global parameter name: saved under one plan, loaded under any other of the same model and batch.

Files are laid out and read by the safetensors library. What is ours on top of it is what docs/CHECKPOINTS.md promises
and torch.distributed.checkpoint (2.13, looked at and tried) does not keep:

- *Nothing is executed by loading.* Its `.metadata` is a pickle: one put in its place ran code on `dcp.load`.
- *Damage is named.* It keeps no hashes: with one bit flipped in a file, `dcp.load` gave a wrong value and no error,
  from its own format and from its safetensors files alike.
- *Whole or not at all.* Only its metadata is renamed into place; the data files of a save over an older one are not.
- *Any plan.* Its chunks are boxes. What ZeRO leaves of a tensor that is cut along another dim (or in blocks, as fused
  q, k, v are) is a stretch of it laid flat: up to one box for every row.
- *No process group.* It agrees by collectives of pickled objects; ranks that share a process have no process group.
- *Signs of life.* It has no place where the watchdog could hear of a save that goes on.

Nor does the library write straight to disk for us: `save_file` takes a rank's whole state at once (which has to be in
host memory then), does not force it to the disk, gives no hash, and is silent until it ends. So pieces are cut into
files of bounded size; the library lays out each of them in memory, and `tensors.py` puts the bytes on the disk.
"""
