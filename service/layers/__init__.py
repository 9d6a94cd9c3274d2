"""The library: named layers, checkpoint families, the store on disk."""
