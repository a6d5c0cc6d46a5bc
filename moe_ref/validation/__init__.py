"""The loop on the machine at hand: calibrate, predict, measure.

Kernels give a hardware pack, some training steps give a stack profile, and both predict the time of
other steps, which are then measured. Importing this package does not load torch.
"""
