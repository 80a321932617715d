"""What work costs on a device: counted, predicted for devices that are not here, measured on one."""
