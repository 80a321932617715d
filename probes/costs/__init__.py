"""What probes ask of a device, for `ssl-bench cost`; a file a probe or two that are alike."""
