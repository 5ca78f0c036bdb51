"""The engine `bpftrace`: it writes a script for the plan, and reads its output as records."""
