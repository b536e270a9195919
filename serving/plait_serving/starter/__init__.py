"""The starter models: emoji pictures, two ControlNets and three LoRAs, and the code that trained them."""
