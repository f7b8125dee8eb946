"""The compiled operators, and cases that compare them with their specification."""
