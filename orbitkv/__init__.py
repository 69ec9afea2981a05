"""OrbitKV: the KV cache of an LLM engine, saved and restored through declared graphs."""

from orbitkv.config import Config
from orbitkv.errors import OrbitError
from orbitkv.graph import Chart, Edge, Graph, Node
from orbitkv.pipeline import load_pipeline
from orbitkv.runtime.client import Client
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.leases import PrefixLease
from orbitkv.runtime.manager import Manager
from orbitkv.segment import HND, NHD, Axis, Geometry, ModelIdentity, Role, Slot, hash_pages
from orbitkv.stages.ticket import Failed, Miss, Restored, Saved, Ticket

__all__ = [
    "HND",
    "NHD",
    "Axis",
    "Chart",
    "Client",
    "Config",
    "Edge",
    "Failed",
    "Geometry",
    "Graph",
    "Instance",
    "Manager",
    "Miss",
    "ModelIdentity",
    "Node",
    "OrbitError",
    "PrefixLease",
    "Restored",
    "Role",
    "Saved",
    "Slot",
    "Ticket",
    "hash_pages",
    "load_pipeline",
]
