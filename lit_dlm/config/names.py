"""Short names of classes that configurations may use, and where each is; nothing is imported."""

from __future__ import annotations

_CLASSES = """
lit_dlm.backbones: architecture.Architecture experts.Experts hf.HFBackbone lora.LoRASettings
    projection.FeatureSettings resolution.FromAR
lit_dlm.callbacks: adapter_checkpoint.AdapterCheckpoint attention_annealing.AttentionAnnealing
    decode_writer.DecodeWriter discrimination.DiscriminationScore interruption.Interruption
    joint_early_stopping.JointEarlyStopping judge.HttpJudge progress.ProgressBar
    progress.TrainingLog record_shards.RolloutWriter reward_curve.CalibrationPlot
    reward_curve.RewardCurve trace_pictures.TracePictures
lit_dlm.datamodules: pretraining.PretrainDataModule prompts.PromptDataModule
    resuming.ResumableDataModule rollouts.RolloutDataModule supervised.SupervisedDataModule
    trajectories.TrajectoryDataModule
lit_dlm.datamodules.supervised_sources: PreferencesFile RecordedDecodes RecordedPairs ResponsesFile
    ResponsesList TABOMFile TaskReferences
lit_dlm.decoding: decoder.DecodeSettings decoder.Decoder decoder.Sweep guidance.Guidance
    pipeline.PipelineWindow policies.calibrated.PCSamplerPolicy policies.editing.TokenEditingPolicy
    policies.history.CreditPolicy policies.history.KLASSPolicy policies.remdm.ReMDMPolicy
    policies.wino.WINOPolicy regions.Region sampler.Sampler
lit_dlm.decoding.caches: BlockCache DualCache NoCache PrefixCache SubBlockCache
lit_dlm.decoding.layout: FixedLayout FractionLayout MarkerLayout PictureLayout TemplateLayout
lit_dlm.decoding.policies.base: ConfidencePolicy DynamicPolicy EBSamplerPolicy EntropyBoundedPolicy
    EntropyPolicy FactorPolicy MarginPolicy NoisyConfidencePolicy RandomPolicy SequentialPolicy
    ThresholdPolicy
lit_dlm.decoding.quotas: BudgetQuota CosineQuota EvenQuota FixedQuota NoQuota ScheduleQuota
lit_dlm.decoding.windows: BlockWindow FullWindow SlidingWindow SteppedBlockWindow
lit_dlm.finetuning: d2f.D2FModule d2f.RisingMasking dparallel.BlockComplements
    dparallel.DParallelModule dpo.DPOModule editing.EditModule hybrid.HybridModule muon.MuonAdamW
    pretrain.PretrainModule sft.SFTModule tabom.TABOMModule tabom.TimeDelay
    trainable.TrainableModule
lit_dlm.lockstep: reward.LockstepReward
lit_dlm.lockstep.policy: BonusPolicy GaussSeidelPolicy JacobiPolicy LaggedPolicy
lit_dlm.predict: decode.CheckedModule decode.DecodeModule
lit_dlm.rewards: base.MeanCorrectnessFilter base.SpreadFilter graded.FormatReward graded.Graded
    judge.HttpStepJudge process.ProcessReward reward_model.RewardModel speed.ForwardPrice
    speed.RightAndFast
lit_dlm.rl: ebpo.EBPO espo.ESPO module.TraceRLModule policy_losses.ClippedPolicyLoss
    rollout_files.RolloutFiles settings.PolicyObjective spg.SPG wd1.SoftmaxWeights
    wd1.WeightedLikelihood
lit_dlm.rl.advantages: GroupMean GroupZScore LeaveOneOut LessFirst RawReward
lit_dlm.tasks: alpaca.Alpaca code_tests.CodeTests drawings.DrawingPrompts gsm8k.GSM8K
    humaneval.HumanEval humaneval.HumanEvalPlus kodcode.KodCode livecodebench.LiveCodeBench
    math.MATH mbpp.MBPP mbpp.MBPPPlus prompts_file.PromptsFile
lit_dlm.tasks.multiple_choice: GPQA MMLUPro MMMU MultipleChoice SEEDBench
lit_dlm.toy: addition.Addition countdown.Countdown pictures.DigitDrawings pictures.DigitScorer
    pictures.PictureQuestions python_functions.PythonFunctions python_functions.WideFunctions
    sudoku.Sudoku word_problems.WordProblems
lit_dlm.tracelock: autoencoder.AutoencoderModule generate.TraceModule loss.AcceptanceLossSettings
    metrics.SelectionSettings module.TraceLockModule outcome.TraceLockRLModule
    policy.TraceLockPolicy scorer.ScorerSettings
lit_dlm.training: bounds.BoundViews bounds.DecodedViews sharding.ShardedStrategy
lit_dlm.training.masking: Autoregressive CoupledMasking CoupledViews MaskedPrompt RandomMasking
    SemiAutoregressive TraceMasking
lit_dlm.vision: base.VisionSettings
lightning.pytorch.callbacks: BackboneFinetuning BatchSizeFinder DeviceStatsMonitor
    EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback LearningRateFinder
    LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint
    RichModelSummary RichProgressBar SpikeDetection StochasticWeightAveraging TQDMProgressBar
    ThroughputMonitor Timer WeightAveraging
lightning.pytorch.loggers: CSVLogger CometLogger LitLogger MLFlowLogger TensorBoardLogger
    WandbLogger
lightning.pytorch.profilers: AdvancedProfiler PassThroughProfiler PyTorchProfiler SimpleProfiler
lightning.pytorch.strategies: DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy
    SingleDeviceStrategy
torch.optim: ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop
    SGD SparseAdam
torch.optim.lr_scheduler: ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts
    CyclicLR ExponentialLR LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR
    ReduceLROnPlateau SequentialLR StepLR
"""
"""A package or module, and classes in it, each by its path from there."""

# A text and not a dict: as literals, the entries would repeat their modules' paths 190 times.
NAMES: dict[str, str] = {}
"""Short name to import path."""
for _line in _CLASSES.replace("\n    ", " ").strip().splitlines():
    _place, _, _paths = _line.partition(": ")
    NAMES |= {_path.rpartition(".")[2]: f"{_place}.{_path}" for _path in _paths.split()}
