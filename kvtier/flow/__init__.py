"""One sequence whose KV shrinks while it grows."""
