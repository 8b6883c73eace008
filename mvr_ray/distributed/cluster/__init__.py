"""Join or start a Ray cluster, and run functions, pools of workers and stages on it, or in this process without one."""
