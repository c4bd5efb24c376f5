"""The devices of a run: the mesh, the processes that share it, their communication, and accelerator data sheets."""
