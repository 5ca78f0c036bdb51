"""What this machine is, what runs on it, and what its refusals mean."""
