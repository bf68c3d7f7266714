"""Configuration, torch-free: recipes, manifests, leases, Prefect blocks."""
