"""The report of a job: one page that shows its work, and the limits of its speed."""
