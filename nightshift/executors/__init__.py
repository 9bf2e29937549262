"""Where runs happen: this machine or a cluster; processes, GPUs and cores."""
