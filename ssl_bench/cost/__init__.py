"""What work costs on a device: counted, predicted where there is none, measured where one is."""
