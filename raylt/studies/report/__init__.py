"""Tables, drawings and the HTML report of a study."""
