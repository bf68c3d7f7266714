"""Configuration: recipes, manifests, and the Prefect blocks of this package (the ``prefect.collections`` entry point)."""
