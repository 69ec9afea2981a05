"""Engines that OrbitKV serves: one thin module each, imported only by whoever uses it."""
