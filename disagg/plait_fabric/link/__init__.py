"""What a network link costs: parameters, ports, calibration, and channels at a link's pace."""
