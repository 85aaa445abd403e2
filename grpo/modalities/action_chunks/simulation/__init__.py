"""Simulators of robots: what a policy acts in, run in processes of their own."""
