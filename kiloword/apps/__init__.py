"""What one can live without, on top of the library: each an application in its own folder."""
