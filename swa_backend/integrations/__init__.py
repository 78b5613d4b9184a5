"""Serving engines that this library can be switched on in, one package each. Nothing else imports them."""
