"""A server with OpenAI's interface: the thread that decodes, and the application before it."""
