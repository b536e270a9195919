"""The cost of a network link: parameters, ports, calibration, and channels that run at a link's speed."""
