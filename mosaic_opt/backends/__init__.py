"""Ways to search a problem.

A backend reports; only :func:`mosaic_opt.solver.solve` grants OPTIMAL.
"""
