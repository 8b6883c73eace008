"""Describes one whole experiment: the sections of the run file, what each setting means, and how the file is read."""

from mvr_ray.config.loader import model_name as model_name
from mvr_ray.config.loader import resolve_model as resolve_model
from mvr_ray.config.loader import resolve_path as resolve_path
from mvr_ray.config.run import DenseWeight as DenseWeight
from mvr_ray.config.run import EncoderConfig as EncoderConfig
from mvr_ray.config.run import EvaluateConfig as EvaluateConfig
from mvr_ray.config.run import FieldType as FieldType
from mvr_ray.config.run import FollowConfig as FollowConfig
from mvr_ray.config.run import IndexConfig as IndexConfig
from mvr_ray.config.run import PrepareConfig as PrepareConfig
from mvr_ray.config.run import RefineConfig as RefineConfig
from mvr_ray.config.run import ResourcesConfig as ResourcesConfig
from mvr_ray.config.run import RunConfig as RunConfig
from mvr_ray.config.run import ServeConfig as ServeConfig
from mvr_ray.config.run import SourceConfig as SourceConfig
from mvr_ray.config.run import SplitConfig as SplitConfig
from mvr_ray.config.run import StoreConfig as StoreConfig
from mvr_ray.config.run import check_field_name as check_field_name
from mvr_ray.config.run import load_run as load_run
from mvr_ray.config.run import parse_run as parse_run
from mvr_ray.config.train import MineConfig as MineConfig
from mvr_ray.config.train import TrainConfig as TrainConfig
