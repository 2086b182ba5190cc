"""Jobs that go on without ranks that have failed: ``ringdl.elastic.run(train, state)``."""

from ringdl.elastic._run import run
from ringdl.elastic._sampler import ElasticSampler
from ringdl.elastic._state import ArrayState, JaxState, ObjectState, State

__all__ = ["ArrayState", "ElasticSampler", "JaxState", "ObjectState", "State", "run"]
