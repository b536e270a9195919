"""The routes of OpenAI's Images API."""
