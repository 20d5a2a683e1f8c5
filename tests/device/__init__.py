"""A simulated accelerator for torch: `device.simulated.load()` makes "sim" a device type of this process."""
