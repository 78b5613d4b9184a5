import os

# Read when torch is loaded: tests run beside each other, where threads that spin while they wait cost minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
