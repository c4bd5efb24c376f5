"""The devices of a run: mesh, processes and their communication, compiled programs, and accelerator data sheets."""
