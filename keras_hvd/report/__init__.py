"""The report of a job: one page that shows what it did, and what held it back."""
