"""Child processes: started, listened to, ended with their parent."""
