"""What somebody who sees an upload can make of it: attacks on what methods send, and figures of how far they get."""
