"""Request and reply: requests are messages, replies go through a broker's memory."""
