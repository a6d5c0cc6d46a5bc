"""What the machine at hand does with each kernel of a training step: tables, and a pack of them.

`calibrate` measures, family by family, into the tables that `perfmodel.calibration.fit` takes, and
fits a hardware pack to them. Importing this package does not load torch.
"""
