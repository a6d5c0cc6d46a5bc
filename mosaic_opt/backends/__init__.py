"""Ways to search a problem. A backend reports; only :func:`mosaic_opt.solve` grants OPTIMAL."""
