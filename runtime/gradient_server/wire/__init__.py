"""The gradient server's protocol: messages of versions 1 and 2, frames, links and the join handshake."""
