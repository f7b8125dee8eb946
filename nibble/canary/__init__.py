"""The canary: checks what the server computes and answers before it admits clients."""
