"""The starter models: emoji images, two ControlNets and three LoRAs, and the code that trained them."""
