"""What kvtier gains and costs a vLLM engine on this machine's CPU; see `__main__`."""
