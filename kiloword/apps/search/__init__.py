"""Search in photos without captions: `kiloword index`, `search` and `serve`."""
