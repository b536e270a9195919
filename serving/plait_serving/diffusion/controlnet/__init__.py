"""ControlNets as a service over the fabric, and which place asks which: here or there."""
