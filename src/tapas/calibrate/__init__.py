"""What a device and its links reach, measured where they are, and written as a cluster file."""
