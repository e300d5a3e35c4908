"""What runs inside a guest: its init, and one module for each scenario."""
