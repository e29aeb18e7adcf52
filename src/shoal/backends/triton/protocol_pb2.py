"""Made of protocol.proto by protocol_compile.py: change that file, not this one."""

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
    b'\n\x0eprotocol.proto\x12\x0cshoal.triton"\x13\n\x11ServerLiveRequest"(\n\x12ServerLiveRespons'
    b'e\x12\x12\n\x04live\x18\x01 \x01(\x08R\x04live"\x14\n\x12ServerReadyRequest"+\n\x13ServerRead'
    b'yResponse\x12\x14\n\x05ready\x18\x01 \x01(\x08R\x05ready"A\n\x11ModelReadyRequest\x12\x12\n'
    b'\x04name\x18\x01 \x01(\tR\x04name\x12\x18\n\x07version\x18\x02 \x01(\tR\x07version"*\n\x12Mod'
    b'elReadyResponse\x12\x14\n\x05ready\x18\x01 \x01(\x08R\x05ready"\x17\n\x15ServerMetadataReques'
    b't"f\n\x16ServerMetadataResponse\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12\x18\n\x07versi'
    b'on\x18\x02 \x01(\tR\x07version\x12\x1e\n\nextensions\x18\x03 \x03(\tR\nextensions"D\n\x14Mode'
    b'lMetadataRequest\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12\x18\n\x07version\x18\x02 \x01'
    b'(\tR\x07version"\xd5\x02\n\x15ModelMetadataResponse\x12\x12\n\x04name\x18\x01 \x01(\tR\x04nam'
    b'e\x12\x1a\n\x08versions\x18\x02 \x03(\tR\x08versions\x12\x1a\n\x08platform\x18\x03 \x01(\tR'
    b'\x08platform\x12J\n\x06inputs\x18\x04 \x03(\x0b22.shoal.triton.ModelMetadataResponse.TensorMe'
    b'tadataR\x06inputs\x12L\n\x07outputs\x18\x05 \x03(\x0b22.shoal.triton.ModelMetadataResponse.Te'
    b'nsorMetadataR\x07outputs\x1aV\n\x0eTensorMetadata\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name'
    b'\x12\x1a\n\x08datatype\x18\x02 \x01(\tR\x08datatype\x12\x14\n\x05shape\x18\x03 \x03(\x03R\x05'
    b'shape"\xd7\x01\n\x0eInferParameter\x12\x1f\n\nbool_param\x18\x01 \x01(\x08H\x00R\tboolParam'
    b'\x12!\n\x0bint64_param\x18\x02 \x01(\x03H\x00R\nint64Param\x12#\n\x0cstring_param\x18\x03 '
    b'\x01(\tH\x00R\x0bstringParam\x12#\n\x0cdouble_param\x18\x04 \x01(\x01H\x00R\x0bdoubleParam'
    b'\x12#\n\x0cuint64_param\x18\x05 \x01(\x04H\x00R\x0buint64ParamB\x12\n\x10parameter_choice"'
    b'\xc3\x02\n\x13InferTensorContents\x12#\n\rbool_contents\x18\x01 \x03(\x08R\x0cboolContents'
    b'\x12!\n\x0cint_contents\x18\x02 \x03(\x05R\x0bintContents\x12%\n\x0eint64_contents\x18\x03 '
    b"\x03(\x03R\rint64Contents\x12#\n\ruint_contents\x18\x04 \x03(\rR\x0cuintContents\x12'\n\x0fui"
    b'nt64_contents\x18\x05 \x03(\x04R\x0euint64Contents\x12#\n\rfp32_contents\x18\x06 \x03(\x02R'
    b'\x0cfp32Contents\x12#\n\rfp64_contents\x18\x07 \x03(\x01R\x0cfp64Contents\x12%\n\x0ebytes_con'
    b'tents\x18\x08 \x03(\x0cR\rbytesContents"\xb8\x08\n\x11ModelInferRequest\x12\x1d\n\nmodel_name'
    b'\x18\x01 \x01(\tR\tmodelName\x12#\n\rmodel_version\x18\x02 \x01(\tR\x0cmodelVersion\x12\x0e\n'
    b'\x02id\x18\x03 \x01(\tR\x02id\x12O\n\nparameters\x18\x04 \x03(\x0b2/.shoal.triton.ModelInferR'
    b'equest.ParametersEntryR\nparameters\x12H\n\x06inputs\x18\x05 \x03(\x0b20.shoal.triton.ModelIn'
    b'ferRequest.InferInputTensorR\x06inputs\x12T\n\x07outputs\x18\x06 \x03(\x0b2:.shoal.triton.Mod'
    b'elInferRequest.InferRequestedOutputTensorR\x07outputs\x12,\n\x12raw_input_contents\x18\x07 '
    b'\x03(\x0cR\x10rawInputContents\x1a\xd6\x02\n\x10InferInputTensor\x12\x12\n\x04name\x18\x01 '
    b'\x01(\tR\x04name\x12\x1a\n\x08datatype\x18\x02 \x01(\tR\x08datatype\x12\x14\n\x05shape\x18'
    b'\x03 \x03(\x03R\x05shape\x12`\n\nparameters\x18\x04 \x03(\x0b2@.shoal.triton.ModelInferReques'
    b't.InferInputTensor.ParametersEntryR\nparameters\x12=\n\x08contents\x18\x05 \x01(\x0b2!.shoal.'
    b'triton.InferTensorContentsR\x08contents\x1a[\n\x0fParametersEntry\x12\x10\n\x03key\x18\x01 '
    b'\x01(\tR\x03key\x122\n\x05value\x18\x02 \x01(\x0b2\x1c.shoal.triton.InferParameterR\x05value:'
    b'\x028\x01\x1a\xf9\x01\n\x1aInferRequestedOutputTensor\x12\x12\n\x04name\x18\x01 \x01(\tR\x04n'
    b'ame\x12j\n\nparameters\x18\x02 \x03(\x0b2J.shoal.triton.ModelInferRequest.InferRequestedOutpu'
    b'tTensor.ParametersEntryR\nparameters\x1a[\n\x0fParametersEntry\x12\x10\n\x03key\x18\x01 \x01('
    b'\tR\x03key\x122\n\x05value\x18\x02 \x01(\x0b2\x1c.shoal.triton.InferParameterR\x05value:\x028'
    b'\x01\x1a[\n\x0fParametersEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x122\n\x05value\x18'
    b'\x02 \x01(\x0b2\x1c.shoal.triton.InferParameterR\x05value:\x028\x01"\xf1\x05\n\x12ModelInferR'
    b'esponse\x12\x1d\n\nmodel_name\x18\x01 \x01(\tR\tmodelName\x12#\n\rmodel_version\x18\x02 \x01('
    b'\tR\x0cmodelVersion\x12\x0e\n\x02id\x18\x03 \x01(\tR\x02id\x12P\n\nparameters\x18\x04 \x03('
    b'\x0b20.shoal.triton.ModelInferResponse.ParametersEntryR\nparameters\x12L\n\x07outputs\x18\x05'
    b' \x03(\x0b22.shoal.triton.ModelInferResponse.InferOutputTensorR\x07outputs\x12.\n\x13raw_outp'
    b'ut_contents\x18\x06 \x03(\x0cR\x11rawOutputContents\x1a\xd9\x02\n\x11InferOutputTensor\x12'
    b'\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12\x1a\n\x08datatype\x18\x02 \x01(\tR\x08datatype'
    b'\x12\x14\n\x05shape\x18\x03 \x03(\x03R\x05shape\x12b\n\nparameters\x18\x04 \x03(\x0b2B.shoal.'
    b'triton.ModelInferResponse.InferOutputTensor.ParametersEntryR\nparameters\x12=\n\x08contents'
    b'\x18\x05 \x01(\x0b2!.shoal.triton.InferTensorContentsR\x08contents\x1a[\n\x0fParametersEntry'
    b'\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x122\n\x05value\x18\x02 \x01(\x0b2\x1c.shoal.triton'
    b'.InferParameterR\x05value:\x028\x01\x1a[\n\x0fParametersEntry\x12\x10\n\x03key\x18\x01 \x01('
    b'\tR\x03key\x122\n\x05value\x18\x02 \x01(\x0b2\x1c.shoal.triton.InferParameterR\x05value:\x028'
    b'\x01"\x88\x01\n\x18ModelStreamInferResponse\x12#\n\rerror_message\x18\x01 \x01(\tR\x0cerrorMe'
    b'ssage\x12G\n\x0einfer_response\x18\x02 \x01(\x0b2 .shoal.triton.ModelInferResponseR\rinferRes'
    b'ponse"B\n\x12ModelConfigRequest\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12\x18\n\x07versi'
    b'on\x18\x02 \x01(\tR\x07version"H\n\x13ModelConfigResponse\x121\n\x06config\x18\x01 \x01(\x0b2'
    b'\x19.shoal.triton.ModelConfigR\x06config"F\n\x16ModelStatisticsRequest\x12\x12\n\x04name\x18'
    b'\x01 \x01(\tR\x04name\x12\x18\n\x07version\x18\x02 \x01(\tR\x07version"9\n\x11StatisticDurati'
    b'on\x12\x14\n\x05count\x18\x01 \x01(\x04R\x05count\x12\x0e\n\x02ns\x18\x02 \x01(\x04R\x02ns"'
    b'\x8a\x04\n\x0fInferStatistics\x129\n\x07success\x18\x01 \x01(\x0b2\x1f.shoal.triton.Statistic'
    b'DurationR\x07success\x123\n\x04fail\x18\x02 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR'
    b'\x04fail\x125\n\x05queue\x18\x03 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\x05queue\x12D'
    b'\n\rcompute_input\x18\x04 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\x0ccomputeInput\x12D'
    b'\n\rcompute_infer\x18\x05 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\x0ccomputeInfer\x12F'
    b'\n\x0ecompute_output\x18\x06 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\rcomputeOutput'
    b'\x12<\n\tcache_hit\x18\x07 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\x08cacheHit\x12>\n'
    b'\ncache_miss\x18\x08 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\tcacheMiss"\x98\x03\n\x17'
    b'InferResponseStatistics\x12D\n\rcompute_infer\x18\x01 \x01(\x0b2\x1f.shoal.triton.StatisticDu'
    b'rationR\x0ccomputeInfer\x12F\n\x0ecompute_output\x18\x02 \x01(\x0b2\x1f.shoal.triton.Statisti'
    b'cDurationR\rcomputeOutput\x129\n\x07success\x18\x03 \x01(\x0b2\x1f.shoal.triton.StatisticDura'
    b'tionR\x07success\x123\n\x04fail\x18\x04 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\x04fai'
    b'l\x12F\n\x0eempty_response\x18\x05 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\remptyRespo'
    b'nse\x127\n\x06cancel\x18\x06 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\x06cancel"\x89'
    b'\x02\n\x14InferBatchStatistics\x12\x1d\n\nbatch_size\x18\x01 \x01(\x04R\tbatchSize\x12D\n\rco'
    b'mpute_input\x18\x02 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\x0ccomputeInput\x12D\n\rco'
    b'mpute_infer\x18\x03 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\x0ccomputeInfer\x12F\n\x0e'
    b'compute_output\x18\x04 \x01(\x0b2\x1f.shoal.triton.StatisticDurationR\rcomputeOutput"N\n\x0bM'
    b'emoryUsage\x12\x12\n\x04type\x18\x01 \x01(\tR\x04type\x12\x0e\n\x02id\x18\x02 \x01(\x03R\x02i'
    b'd\x12\x1b\n\tbyte_size\x18\x03 \x01(\x04R\x08byteSize"\xc5\x04\n\x0fModelStatistics\x12\x12\n'
    b'\x04name\x18\x01 \x01(\tR\x04name\x12\x18\n\x07version\x18\x02 \x01(\tR\x07version\x12%\n\x0e'
    b"last_inference\x18\x03 \x01(\x04R\rlastInference\x12'\n\x0finference_count\x18\x04 \x01(\x04R"
    b"\x0einferenceCount\x12'\n\x0fexecution_count\x18\x05 \x01(\x04R\x0eexecutionCount\x12F\n\x0fi"
    b'nference_stats\x18\x06 \x01(\x0b2\x1d.shoal.triton.InferStatisticsR\x0einferenceStats\x12C\n'
    b'\x0bbatch_stats\x18\x07 \x03(\x0b2".shoal.triton.InferBatchStatisticsR\nbatchStats\x12<\n\x0c'
    b'memory_usage\x18\x08 \x03(\x0b2\x19.shoal.triton.MemoryUsageR\x0bmemoryUsage\x12W\n\x0erespon'
    b'se_stats\x18\t \x03(\x0b20.shoal.triton.ModelStatistics.ResponseStatsEntryR\rresponseStats'
    b'\x1ag\n\x12ResponseStatsEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x12;\n\x05value\x18'
    b'\x02 \x01(\x0b2%.shoal.triton.InferResponseStatisticsR\x05value:\x028\x01"Y\n\x17ModelStatist'
    b'icsResponse\x12>\n\x0bmodel_stats\x18\x01 \x03(\x0b2\x1d.shoal.triton.ModelStatisticsR\nmodel'
    b'Stats"\xba\x01\n\x18ModelRepositoryParameter\x12\x1f\n\nbool_param\x18\x01 \x01(\x08H\x00R\tb'
    b'oolParam\x12!\n\x0bint64_param\x18\x02 \x01(\x03H\x00R\nint64Param\x12#\n\x0cstring_param\x18'
    b'\x03 \x01(\tH\x00R\x0bstringParam\x12!\n\x0bbytes_param\x18\x04 \x01(\x0cH\x00R\nbytesParamB'
    b'\x12\n\x10parameter_choice"W\n\x16RepositoryIndexRequest\x12\'\n\x0frepository_name\x18\x01 '
    b'\x01(\tR\x0erepositoryName\x12\x14\n\x05ready\x18\x02 \x01(\x08R\x05ready"\xcd\x01\n\x17Repos'
    b'itoryIndexResponse\x12H\n\x06models\x18\x01 \x03(\x0b20.shoal.triton.RepositoryIndexResponse.'
    b'ModelIndexR\x06models\x1ah\n\nModelIndex\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12\x18\n'
    b'\x07version\x18\x02 \x01(\tR\x07version\x12\x14\n\x05state\x18\x03 \x01(\tR\x05state\x12\x16'
    b'\n\x06reason\x18\x04 \x01(\tR\x06reason"\xa5\x02\n\x1aRepositoryModelLoadRequest\x12\'\n\x0fr'
    b'epository_name\x18\x01 \x01(\tR\x0erepositoryName\x12\x1d\n\nmodel_name\x18\x02 \x01(\tR\tmod'
    b'elName\x12X\n\nparameters\x18\x03 \x03(\x0b28.shoal.triton.RepositoryModelLoadRequest.Paramet'
    b'ersEntryR\nparameters\x1ae\n\x0fParametersEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x12<'
    b'\n\x05value\x18\x02 \x01(\x0b2&.shoal.triton.ModelRepositoryParameterR\x05value:\x028\x01"'
    b'\x1d\n\x1bRepositoryModelLoadResponse"\xa9\x02\n\x1cRepositoryModelUnloadRequest\x12\'\n\x0fr'
    b'epository_name\x18\x01 \x01(\tR\x0erepositoryName\x12\x1d\n\nmodel_name\x18\x02 \x01(\tR\tmod'
    b'elName\x12Z\n\nparameters\x18\x03 \x03(\x0b2:.shoal.triton.RepositoryModelUnloadRequest.Param'
    b'etersEntryR\nparameters\x1ae\n\x0fParametersEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key'
    b'\x12<\n\x05value\x18\x02 \x01(\x0b2&.shoal.triton.ModelRepositoryParameterR\x05value:\x028'
    b'\x01"\x1f\n\x1dRepositoryModelUnloadResponse"\xc3\x01\n\x10ModelRateLimiter\x12E\n\tresources'
    b"\x18\x01 \x03(\x0b2'.shoal.triton.ModelRateLimiter.ResourceR\tresources\x12\x1a\n\x08priority"
    b'\x18\x02 \x01(\rR\x08priority\x1aL\n\x08Resource\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name'
    b'\x12\x16\n\x06global\x18\x02 \x01(\x08R\x06global\x12\x14\n\x05count\x18\x03 \x01(\rR\x05coun'
    b't"\xf9\x04\n\x12ModelInstanceGroup\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name\x129\n\x04kind'
    b'\x18\x04 \x01(\x0e2%.shoal.triton.ModelInstanceGroup.KindR\x04kind\x12\x14\n\x05count\x18\x02'
    b' \x01(\x05R\x05count\x12A\n\x0crate_limiter\x18\x06 \x01(\x0b2\x1e.shoal.triton.ModelRateLimi'
    b'terR\x0brateLimiter\x12\x12\n\x04gpus\x18\x03 \x03(\x05R\x04gpus\x12]\n\x11secondary_devices'
    b'\x18\x08 \x03(\x0b20.shoal.triton.ModelInstanceGroup.SecondaryDeviceR\x10secondaryDevices\x12'
    b'\x18\n\x07profile\x18\x05 \x03(\tR\x07profile\x12\x18\n\x07passive\x18\x07 \x01(\x08R\x07pass'
    b'ive\x12\x1f\n\x0bhost_policy\x18\t \x01(\tR\nhostPolicy\x1a\xaf\x01\n\x0fSecondaryDevice\x12X'
    b'\n\x04kind\x18\x01 \x01(\x0e2D.shoal.triton.ModelInstanceGroup.SecondaryDevice.SecondaryDevic'
    b'eKindR\x04kind\x12\x1b\n\tdevice_id\x18\x02 \x01(\x03R\x08deviceId"%\n\x13SecondaryDeviceKind'
    b'\x12\x0e\n\nKIND_NVDLA\x10\x00"A\n\x04Kind\x12\r\n\tKIND_AUTO\x10\x00\x12\x0c\n\x08KIND_GPU'
    b'\x10\x01\x12\x0c\n\x08KIND_CPU\x10\x02\x12\x0e\n\nKIND_MODEL\x10\x03"*\n\x12ModelTensorReshap'
    b'e\x12\x14\n\x05shape\x18\x01 \x03(\x03R\x05shape"\xc3\x03\n\nModelInput\x12\x12\n\x04name\x18'
    b'\x01 \x01(\tR\x04name\x123\n\tdata_type\x18\x02 \x01(\x0e2\x16.shoal.triton.DataTypeR\x08data'
    b'Type\x127\n\x06format\x18\x03 \x01(\x0e2\x1f.shoal.triton.ModelInput.FormatR\x06format\x12'
    b'\x12\n\x04dims\x18\x04 \x03(\x03R\x04dims\x12:\n\x07reshape\x18\x05 \x01(\x0b2 .shoal.triton.'
    b'ModelTensorReshapeR\x07reshape\x12&\n\x0fis_shape_tensor\x18\x06 \x01(\x08R\risShapeTensor'
    b'\x12,\n\x12allow_ragged_batch\x18\x07 \x01(\x08R\x10allowRaggedBatch\x12\x1a\n\x08optional'
    b'\x18\x08 \x01(\x08R\x08optional\x124\n\x17is_non_linear_format_io\x18\t \x01(\x08R\x13isNonLi'
    b'nearFormatIo";\n\x06Format\x12\x0f\n\x0bFORMAT_NONE\x10\x00\x12\x0f\n\x0bFORMAT_NHWC\x10\x01'
    b'\x12\x0f\n\x0bFORMAT_NCHW\x10\x02"\xab\x02\n\x0bModelOutput\x12\x12\n\x04name\x18\x01 \x01(\t'
    b'R\x04name\x123\n\tdata_type\x18\x02 \x01(\x0e2\x16.shoal.triton.DataTypeR\x08dataType\x12\x12'
    b'\n\x04dims\x18\x03 \x03(\x03R\x04dims\x12:\n\x07reshape\x18\x05 \x01(\x0b2 .shoal.triton.Mode'
    b'lTensorReshapeR\x07reshape\x12%\n\x0elabel_filename\x18\x04 \x01(\tR\rlabelFilename\x12&\n'
    b'\x0fis_shape_tensor\x18\x06 \x01(\x08R\risShapeTensor\x124\n\x17is_non_linear_format_io\x18'
    b'\x07 \x01(\x08R\x13isNonLinearFormatIo"\x88\x03\n\nBatchInput\x121\n\x04kind\x18\x01 \x01('
    b'\x0e2\x1d.shoal.triton.BatchInput.KindR\x04kind\x12\x1f\n\x0btarget_name\x18\x02 \x03(\tR\nta'
    b'rgetName\x123\n\tdata_type\x18\x03 \x01(\x0e2\x16.shoal.triton.DataTypeR\x08dataType\x12!\n'
    b'\x0csource_input\x18\x04 \x03(\tR\x0bsourceInput"\xcd\x01\n\x04Kind\x12\x17\n\x13BATCH_ELEMEN'
    b'T_COUNT\x10\x00\x12#\n\x1fBATCH_ACCUMULATED_ELEMENT_COUNT\x10\x01\x12-\n)BATCH_ACCUMULATED_EL'
    b'EMENT_COUNT_WITH_ZERO\x10\x02\x12$\n BATCH_MAX_ELEMENT_COUNT_AS_SHAPE\x10\x03\x12\x14\n\x10BA'
    b'TCH_ITEM_SHAPE\x10\x04\x12\x1c\n\x18BATCH_ITEM_SHAPE_FLATTEN\x10\x05"\xb1\x01\n\x0bBatchOutpu'
    b't\x12\x1f\n\x0btarget_name\x18\x01 \x03(\tR\ntargetName\x122\n\x04kind\x18\x02 \x01(\x0e2\x1e'
    b'.shoal.triton.BatchOutput.KindR\x04kind\x12!\n\x0csource_input\x18\x03 \x03(\tR\x0bsourceInpu'
    b't"*\n\x04Kind\x12"\n\x1eBATCH_SCATTER_WITH_INPUT_SHAPE\x10\x00"\xc7\x02\n\x12ModelVersionPoli'
    b"cy\x12A\n\x06latest\x18\x01 \x01(\x0b2'.shoal.triton.ModelVersionPolicy.LatestH\x00R\x06lates"
    b't\x128\n\x03all\x18\x02 \x01(\x0b2$.shoal.triton.ModelVersionPolicy.AllH\x00R\x03all\x12G\n'
    b'\x08specific\x18\x03 \x01(\x0b2).shoal.triton.ModelVersionPolicy.SpecificH\x00R\x08specific'
    b'\x1a+\n\x06Latest\x12!\n\x0cnum_versions\x18\x01 \x01(\rR\x0bnumVersions\x1a\x05\n\x03All\x1a'
    b'&\n\x08Specific\x12\x1a\n\x08versions\x18\x01 \x03(\x03R\x08versionsB\x0f\n\rpolicy_choice"'
    b'\x93\x11\n\x17ModelOptimizationPolicy\x12A\n\x05graph\x18\x01 \x01(\x0b2+.shoal.triton.ModelO'
    b'ptimizationPolicy.GraphR\x05graph\x12O\n\x08priority\x18\x02 \x01(\x0e23.shoal.triton.ModelOp'
    b'timizationPolicy.ModelPriorityR\x08priority\x12>\n\x04cuda\x18\x03 \x01(\x0b2*.shoal.triton.M'
    b'odelOptimizationPolicy.CudaR\x04cuda\x12r\n\x16execution_accelerators\x18\x04 \x01(\x0b2;.sho'
    b'al.triton.ModelOptimizationPolicy.ExecutionAcceleratorsR\x15executionAccelerators\x12h\n\x13i'
    b'nput_pinned_memory\x18\x05 \x01(\x0b28.shoal.triton.ModelOptimizationPolicy.PinnedMemoryBuffe'
    b'rR\x11inputPinnedMemory\x12j\n\x14output_pinned_memory\x18\x06 \x01(\x0b28.shoal.triton.Model'
    b'OptimizationPolicy.PinnedMemoryBufferR\x12outputPinnedMemory\x12C\n\x1egather_kernel_buffer_t'
    b'hreshold\x18\x07 \x01(\rR\x1bgatherKernelBufferThreshold\x12%\n\x0eeager_batching\x18\x08 '
    b'\x01(\x08R\reagerBatching\x1a\x1d\n\x05Graph\x12\x14\n\x05level\x18\x01 \x01(\x05R\x05level'
    b'\x1a\xd3\x06\n\x04Cuda\x12\x16\n\x06graphs\x18\x01 \x01(\x08R\x06graphs\x12(\n\x10busy_wait_e'
    b'vents\x18\x02 \x01(\x08R\x0ebusyWaitEvents\x12S\n\ngraph_spec\x18\x03 \x03(\x0b24.shoal.trito'
    b'n.ModelOptimizationPolicy.Cuda.GraphSpecR\tgraphSpec\x12,\n\x12output_copy_stream\x18\x04 '
    b'\x01(\x08R\x10outputCopyStream\x1a\x85\x05\n\tGraphSpec\x12\x1d\n\nbatch_size\x18\x01 \x01('
    b'\x05R\tbatchSize\x12U\n\x05input\x18\x02 \x03(\x0b2?.shoal.triton.ModelOptimizationPolicy.Cud'
    b'a.GraphSpec.InputEntryR\x05input\x12k\n\x11graph_lower_bound\x18\x03 \x01(\x0b2?.shoal.triton'
    b'.ModelOptimizationPolicy.Cuda.GraphSpec.LowerBoundR\x0fgraphLowerBound\x1a\x19\n\x05Shape\x12'
    b'\x10\n\x03dim\x18\x01 \x03(\x03R\x03dim\x1a\x83\x02\n\nLowerBound\x12\x1d\n\nbatch_size\x18'
    b'\x01 \x01(\x05R\tbatchSize\x12`\n\x05input\x18\x02 \x03(\x0b2J.shoal.triton.ModelOptimization'
    b'Policy.Cuda.GraphSpec.LowerBound.InputEntryR\x05input\x1at\n\nInputEntry\x12\x10\n\x03key\x18'
    b'\x01 \x01(\tR\x03key\x12P\n\x05value\x18\x02 \x01(\x0b2:.shoal.triton.ModelOptimizationPolicy'
    b'.Cuda.GraphSpec.ShapeR\x05value:\x028\x01\x1at\n\nInputEntry\x12\x10\n\x03key\x18\x01 \x01(\t'
    b'R\x03key\x12P\n\x05value\x18\x02 \x01(\x0b2:.shoal.triton.ModelOptimizationPolicy.Cuda.GraphS'
    b'pec.ShapeR\x05value:\x028\x01\x1a\xff\x03\n\x15ExecutionAccelerators\x12\x83\x01\n\x19gpu_exe'
    b'cution_accelerator\x18\x01 \x03(\x0b2G.shoal.triton.ModelOptimizationPolicy.ExecutionAccelera'
    b'tors.AcceleratorR\x17gpuExecutionAccelerator\x12\x83\x01\n\x19cpu_execution_accelerator\x18'
    b'\x02 \x03(\x0b2G.shoal.triton.ModelOptimizationPolicy.ExecutionAccelerators.AcceleratorR\x17c'
    b'puExecutionAccelerator\x1a\xd9\x01\n\x0bAccelerator\x12\x12\n\x04name\x18\x01 \x01(\tR\x04nam'
    b'e\x12w\n\nparameters\x18\x02 \x03(\x0b2W.shoal.triton.ModelOptimizationPolicy.ExecutionAccele'
    b'rators.Accelerator.ParametersEntryR\nparameters\x1a=\n\x0fParametersEntry\x12\x10\n\x03key'
    b'\x18\x01 \x01(\tR\x03key\x12\x14\n\x05value\x18\x02 \x01(\tR\x05value:\x028\x01\x1a,\n\x12Pin'
    b'nedMemoryBuffer\x12\x16\n\x06enable\x18\x01 \x01(\x08R\x06enable"I\n\rModelPriority\x12\x14\n'
    b'\x10PRIORITY_DEFAULT\x10\x00\x12\x10\n\x0cPRIORITY_MAX\x10\x01\x12\x10\n\x0cPRIORITY_MIN\x10'
    b'\x02"\xad\x02\n\x10ModelQueuePolicy\x12S\n\x0etimeout_action\x18\x01 \x01(\x0e2,.shoal.triton'
    b'.ModelQueuePolicy.TimeoutActionR\rtimeoutAction\x12@\n\x1cdefault_timeout_microseconds\x18'
    b'\x02 \x01(\x04R\x1adefaultTimeoutMicroseconds\x124\n\x16allow_timeout_override\x18\x03 \x01('
    b'\x08R\x14allowTimeoutOverride\x12$\n\x0emax_queue_size\x18\x04 \x01(\rR\x0cmaxQueueSize"&\n\r'
    b'TimeoutAction\x12\n\n\x06REJECT\x10\x00\x12\t\n\x05DELAY\x10\x01"\xc0\x04\n\x14ModelDynamicBa'
    b'tching\x120\n\x14preferred_batch_size\x18\x01 \x03(\x05R\x12preferredBatchSize\x12?\n\x1cmax_'
    b'queue_delay_microseconds\x18\x02 \x01(\x04R\x19maxQueueDelayMicroseconds\x12+\n\x11preserve_o'
    b"rdering\x18\x03 \x01(\x08R\x10preserveOrdering\x12'\n\x0fpriority_levels\x18\x04 \x01(\x04R"
    b'\x0epriorityLevels\x124\n\x16default_priority_level\x18\x05 \x01(\x04R\x14defaultPriorityLeve'
    b'l\x12P\n\x14default_queue_policy\x18\x06 \x01(\x0b2\x1e.shoal.triton.ModelQueuePolicyR\x12def'
    b'aultQueuePolicy\x12o\n\x15priority_queue_policy\x18\x07 \x03(\x0b2;.shoal.triton.ModelDynamic'
    b'Batching.PriorityQueuePolicyEntryR\x13priorityQueuePolicy\x1af\n\x18PriorityQueuePolicyEntry'
    b'\x12\x10\n\x03key\x18\x01 \x01(\x04R\x03key\x124\n\x05value\x18\x02 \x01(\x0b2\x1e.shoal.trit'
    b'on.ModelQueuePolicyR\x05value:\x028\x01"\xc9\x0e\n\x15ModelSequenceBatching\x12L\n\x06direct'
    b'\x18\x03 \x01(\x0b22.shoal.triton.ModelSequenceBatching.StrategyDirectH\x00R\x06direct\x12L\n'
    b'\x06oldest\x18\x04 \x01(\x0b22.shoal.triton.ModelSequenceBatching.StrategyOldestH\x00R\x06old'
    b'est\x12C\n\x1emax_sequence_idle_microseconds\x18\x01 \x01(\x04R\x1bmaxSequenceIdleMicrosecond'
    b's\x12U\n\rcontrol_input\x18\x02 \x03(\x0b20.shoal.triton.ModelSequenceBatching.ControlInputR'
    b'\x0ccontrolInput\x12?\n\x05state\x18\x05 \x03(\x0b2).shoal.triton.ModelSequenceBatching.State'
    b'R\x05state\x12-\n\x12iterative_sequence\x18\x06 \x01(\x08R\x11iterativeSequence\x1a\xf5\x02\n'
    b'\x07Control\x12D\n\x04kind\x18\x01 \x01(\x0e20.shoal.triton.ModelSequenceBatching.Control.Kin'
    b'dR\x04kind\x12(\n\x10int32_false_true\x18\x02 \x03(\x05R\x0eint32FalseTrue\x12&\n\x0ffp32_fal'
    b'se_true\x18\x03 \x03(\x02R\rfp32FalseTrue\x12&\n\x0fbool_false_true\x18\x05 \x03(\x08R\rboolF'
    b'alseTrue\x123\n\tdata_type\x18\x04 \x01(\x0e2\x16.shoal.triton.DataTypeR\x08dataType"u\n\x04K'
    b'ind\x12\x1a\n\x16CONTROL_SEQUENCE_START\x10\x00\x12\x1a\n\x16CONTROL_SEQUENCE_READY\x10\x01'
    b'\x12\x18\n\x14CONTROL_SEQUENCE_END\x10\x02\x12\x1b\n\x17CONTROL_SEQUENCE_CORRID\x10\x03\x1ai'
    b'\n\x0cControlInput\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12E\n\x07control\x18\x02 \x03('
    b'\x0b2+.shoal.triton.ModelSequenceBatching.ControlR\x07control\x1a\xb7\x01\n\x0cInitialState'
    b'\x123\n\tdata_type\x18\x01 \x01(\x0e2\x16.shoal.triton.DataTypeR\x08dataType\x12\x12\n\x04dim'
    b's\x18\x02 \x03(\x03R\x04dims\x12\x1d\n\tzero_data\x18\x03 \x01(\x08H\x00R\x08zeroData\x12\x1d'
    b'\n\tdata_file\x18\x04 \x01(\tH\x00R\x08dataFile\x12\x12\n\x04name\x18\x05 \x01(\tR\x04nameB'
    b'\x0c\n\nstate_data\x1a\xde\x02\n\x05State\x12\x1d\n\ninput_name\x18\x01 \x01(\tR\tinputName'
    b'\x12\x1f\n\x0boutput_name\x18\x02 \x01(\tR\noutputName\x123\n\tdata_type\x18\x03 \x01(\x0e2'
    b'\x16.shoal.triton.DataTypeR\x08dataType\x12\x12\n\x04dims\x18\x04 \x03(\x03R\x04dims\x12U\n\r'
    b'initial_state\x18\x05 \x03(\x0b20.shoal.triton.ModelSequenceBatching.InitialStateR\x0cinitial'
    b'State\x12E\n use_same_buffer_for_input_output\x18\x06 \x01(\x08R\x1buseSameBufferForInputOutp'
    b'ut\x12.\n\x13use_growable_memory\x18\x07 \x01(\x08R\x11useGrowableMemory\x1a\x8b\x01\n\x0eStr'
    b'ategyDirect\x12?\n\x1cmax_queue_delay_microseconds\x18\x01 \x01(\x04R\x19maxQueueDelayMicrose'
    b'conds\x128\n\x18minimum_slot_utilization\x18\x02 \x01(\x02R\x16minimumSlotUtilization\x1a\xe8'
    b'\x01\n\x0eStrategyOldest\x126\n\x17max_candidate_sequences\x18\x01 \x01(\x05R\x15maxCandidate'
    b'Sequences\x120\n\x14preferred_batch_size\x18\x02 \x03(\x05R\x12preferredBatchSize\x12?\n\x1cm'
    b'ax_queue_delay_microseconds\x18\x03 \x01(\x04R\x19maxQueueDelayMicroseconds\x12+\n\x11preserv'
    b'e_ordering\x18\x04 \x01(\x08R\x10preserveOrderingB\x11\n\x0fstrategy_choice"\x8f\x04\n\x0fMod'
    b'elEnsembling\x126\n\x04step\x18\x01 \x03(\x0b2".shoal.triton.ModelEnsembling.StepR\x04step'
    b'\x122\n\x15max_inflight_requests\x18\x02 \x01(\rR\x13maxInflightRequests\x1a\x8f\x03\n\x04Ste'
    b'p\x12\x1d\n\nmodel_name\x18\x01 \x01(\tR\tmodelName\x12#\n\rmodel_version\x18\x02 \x01(\x03R'
    b'\x0cmodelVersion\x12M\n\tinput_map\x18\x03 \x03(\x0b20.shoal.triton.ModelEnsembling.Step.Inpu'
    b'tMapEntryR\x08inputMap\x12P\n\noutput_map\x18\x04 \x03(\x0b21.shoal.triton.ModelEnsembling.St'
    b"ep.OutputMapEntryR\toutputMap\x12'\n\x0fmodel_namespace\x18\x05 \x01(\tR\x0emodelNamespace"
    b'\x1a;\n\rInputMapEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x12\x14\n\x05value\x18\x02 '
    b'\x01(\tR\x05value:\x028\x01\x1a<\n\x0eOutputMapEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key'
    b'\x12\x14\n\x05value\x18\x02 \x01(\tR\x05value:\x028\x01"3\n\x0eModelParameter\x12!\n\x0cstrin'
    b'g_value\x18\x01 \x01(\tR\x0bstringValue"\xc3\x03\n\x0bModelWarmup\x12\x12\n\x04name\x18\x01 '
    b'\x01(\tR\x04name\x12\x1d\n\nbatch_size\x18\x02 \x01(\rR\tbatchSize\x12=\n\x06inputs\x18\x03 '
    b'\x03(\x0b2%.shoal.triton.ModelWarmup.InputsEntryR\x06inputs\x12\x14\n\x05count\x18\x04 \x01('
    b'\rR\x05count\x1a\xcf\x01\n\x05Input\x123\n\tdata_type\x18\x01 \x01(\x0e2\x16.shoal.triton.Dat'
    b'aTypeR\x08dataType\x12\x12\n\x04dims\x18\x02 \x03(\x03R\x04dims\x12\x1d\n\tzero_data\x18\x03 '
    b'\x01(\x08H\x00R\x08zeroData\x12!\n\x0brandom_data\x18\x04 \x01(\x08H\x00R\nrandomData\x12(\n'
    b'\x0finput_data_file\x18\x05 \x01(\tH\x00R\rinputDataFileB\x11\n\x0finput_data_type\x1aZ\n\x0b'
    b'InputsEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x125\n\x05value\x18\x02 \x01(\x0b2\x1f.s'
    b'hoal.triton.ModelWarmup.InputR\x05value:\x028\x01"A\n\x0fModelOperations\x12.\n\x13op_library'
    b'_filename\x18\x01 \x03(\tR\x11opLibraryFilename"6\n\x16ModelTransactionPolicy\x12\x1c\n\tdeco'
    b'upled\x18\x01 \x01(\x08R\tdecoupled"\x92\x02\n\x15ModelRepositoryAgents\x12A\n\x06agents\x18'
    b'\x01 \x03(\x0b2).shoal.triton.ModelRepositoryAgents.AgentR\x06agents\x1a\xb5\x01\n\x05Agent'
    b'\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12Y\n\nparameters\x18\x02 \x03(\x0b29.shoal.trit'
    b'on.ModelRepositoryAgents.Agent.ParametersEntryR\nparameters\x1a=\n\x0fParametersEntry\x12\x10'
    b'\n\x03key\x18\x01 \x01(\tR\x03key\x12\x14\n\x05value\x18\x02 \x01(\tR\x05value:\x028\x01",\n'
    b'\x12ModelResponseCache\x12\x16\n\x06enable\x18\x01 \x01(\x08R\x06enable"\xaf\x03\n\x0cModelMe'
    b'trics\x12O\n\x0emetric_control\x18\x01 \x03(\x0b2(.shoal.triton.ModelMetrics.MetricControlR\r'
    b'metricControl\x1a\xcd\x02\n\rMetricControl\x12f\n\x11metric_identifier\x18\x01 \x01(\x0b29.sh'
    b'oal.triton.ModelMetrics.MetricControl.MetricIdentifierR\x10metricIdentifier\x12h\n\x11histogr'
    b'am_options\x18\x02 \x01(\x0b29.shoal.triton.ModelMetrics.MetricControl.HistogramOptionsH\x00R'
    b'\x10histogramOptions\x1a*\n\x10MetricIdentifier\x12\x16\n\x06family\x18\x01 \x01(\tR\x06famil'
    b'y\x1a,\n\x10HistogramOptions\x12\x18\n\x07buckets\x18\x01 \x03(\x01R\x07bucketsB\x10\n\x0emet'
    b'ric_options"\xb8\x0e\n\x0bModelConfig\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name\x12\x1a\n'
    b'\x08platform\x18\x02 \x01(\tR\x08platform\x12\x18\n\x07backend\x18\x11 \x01(\tR\x07backend'
    b'\x12\x18\n\x07runtime\x18\x19 \x01(\tR\x07runtime\x12G\n\x0eversion_policy\x18\x03 \x01(\x0b2'
    b' .shoal.triton.ModelVersionPolicyR\rversionPolicy\x12$\n\x0emax_batch_size\x18\x04 \x01(\x05R'
    b'\x0cmaxBatchSize\x12.\n\x05input\x18\x05 \x03(\x0b2\x18.shoal.triton.ModelInputR\x05input\x12'
    b'1\n\x06output\x18\x06 \x03(\x0b2\x19.shoal.triton.ModelOutputR\x06output\x129\n\x0bbatch_inpu'
    b't\x18\x14 \x03(\x0b2\x18.shoal.triton.BatchInputR\nbatchInput\x12<\n\x0cbatch_output\x18\x15 '
    b'\x03(\x0b2\x19.shoal.triton.BatchOutputR\x0bbatchOutput\x12I\n\x0coptimization\x18\x0c \x01('
    b'\x0b2%.shoal.triton.ModelOptimizationPolicyR\x0coptimization\x12O\n\x10dynamic_batching\x18'
    b'\x0b \x01(\x0b2".shoal.triton.ModelDynamicBatchingH\x00R\x0fdynamicBatching\x12R\n\x11sequenc'
    b'e_batching\x18\r \x01(\x0b2#.shoal.triton.ModelSequenceBatchingH\x00R\x10sequenceBatching\x12'
    b'P\n\x13ensemble_scheduling\x18\x0f \x01(\x0b2\x1d.shoal.triton.ModelEnsemblingH\x00R\x12ensem'
    b'bleScheduling\x12G\n\x0einstance_group\x18\x07 \x03(\x0b2 .shoal.triton.ModelInstanceGroupR\r'
    b'instanceGroup\x124\n\x16default_model_filename\x18\x08 \x01(\tR\x14defaultModelFilename\x12]'
    b'\n\x12cc_model_filenames\x18\t \x03(\x0b2/.shoal.triton.ModelConfig.CcModelFilenamesEntryR'
    b'\x10ccModelFilenames\x12J\n\x0bmetric_tags\x18\n \x03(\x0b2).shoal.triton.ModelConfig.MetricT'
    b'agsEntryR\nmetricTags\x12I\n\nparameters\x18\x0e \x03(\x0b2).shoal.triton.ModelConfig.Paramet'
    b'ersEntryR\nparameters\x12<\n\x0cmodel_warmup\x18\x10 \x03(\x0b2\x19.shoal.triton.ModelWarmupR'
    b'\x0bmodelWarmup\x12H\n\x10model_operations\x18\x12 \x01(\x0b2\x1d.shoal.triton.ModelOperation'
    b'sR\x0fmodelOperations\x12^\n\x18model_transaction_policy\x18\x13 \x01(\x0b2$.shoal.triton.Mod'
    b'elTransactionPolicyR\x16modelTransactionPolicy\x12[\n\x17model_repository_agents\x18\x17 \x01'
    b'(\x0b2#.shoal.triton.ModelRepositoryAgentsR\x15modelRepositoryAgents\x12G\n\x0eresponse_cache'
    b'\x18\x18 \x01(\x0b2 .shoal.triton.ModelResponseCacheR\rresponseCache\x12?\n\rmodel_metrics'
    b'\x18\x1a \x01(\x0b2\x1a.shoal.triton.ModelMetricsR\x0cmodelMetrics\x1aC\n\x15CcModelFilenames'
    b'Entry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x12\x14\n\x05value\x18\x02 \x01(\tR\x05value:'
    b'\x028\x01\x1a=\n\x0fMetricTagsEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key\x12\x14\n\x05val'
    b'ue\x18\x02 \x01(\tR\x05value:\x028\x01\x1a[\n\x0fParametersEntry\x12\x10\n\x03key\x18\x01 '
    b'\x01(\tR\x03key\x122\n\x05value\x18\x02 \x01(\x0b2\x1c.shoal.triton.ModelParameterR\x05value:'
    b'\x028\x01B\x13\n\x11scheduling_choice*\xfa\x01\n\x08DataType\x12\x10\n\x0cTYPE_INVALID\x10'
    b'\x00\x12\r\n\tTYPE_BOOL\x10\x01\x12\x0e\n\nTYPE_UINT8\x10\x02\x12\x0f\n\x0bTYPE_UINT16\x10'
    b'\x03\x12\x0f\n\x0bTYPE_UINT32\x10\x04\x12\x0f\n\x0bTYPE_UINT64\x10\x05\x12\r\n\tTYPE_INT8\x10'
    b'\x06\x12\x0e\n\nTYPE_INT16\x10\x07\x12\x0e\n\nTYPE_INT32\x10\x08\x12\x0e\n\nTYPE_INT64\x10\t'
    b'\x12\r\n\tTYPE_FP16\x10\n\x12\r\n\tTYPE_FP32\x10\x0b\x12\r\n\tTYPE_FP64\x10\x0c\x12\x0f\n\x0b'
    b'TYPE_STRING\x10\r\x12\r\n\tTYPE_BF16\x10\x0eb\x06proto3'
)


def _message(descriptor):
    made = message_factory.GetMessageClass(descriptor)
    for nested in descriptor.nested_types:  # protobuf's own Python implementation leaves them out
        if not hasattr(made, nested.name):
            setattr(made, nested.name, _message(nested))
    return made


DataType = EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["DataType"])
TYPE_INVALID = 0
TYPE_BOOL = 1
TYPE_UINT8 = 2
TYPE_UINT16 = 3
TYPE_UINT32 = 4
TYPE_UINT64 = 5
TYPE_INT8 = 6
TYPE_INT16 = 7
TYPE_INT32 = 8
TYPE_INT64 = 9
TYPE_FP16 = 10
TYPE_FP32 = 11
TYPE_FP64 = 12
TYPE_STRING = 13
TYPE_BF16 = 14
ServerLiveRequest = _message(DESCRIPTOR.message_types_by_name["ServerLiveRequest"])
ServerLiveResponse = _message(DESCRIPTOR.message_types_by_name["ServerLiveResponse"])
ServerReadyRequest = _message(DESCRIPTOR.message_types_by_name["ServerReadyRequest"])
ServerReadyResponse = _message(DESCRIPTOR.message_types_by_name["ServerReadyResponse"])
ModelReadyRequest = _message(DESCRIPTOR.message_types_by_name["ModelReadyRequest"])
ModelReadyResponse = _message(DESCRIPTOR.message_types_by_name["ModelReadyResponse"])
ServerMetadataRequest = _message(DESCRIPTOR.message_types_by_name["ServerMetadataRequest"])
ServerMetadataResponse = _message(DESCRIPTOR.message_types_by_name["ServerMetadataResponse"])
ModelMetadataRequest = _message(DESCRIPTOR.message_types_by_name["ModelMetadataRequest"])
ModelMetadataResponse = _message(DESCRIPTOR.message_types_by_name["ModelMetadataResponse"])
InferParameter = _message(DESCRIPTOR.message_types_by_name["InferParameter"])
InferTensorContents = _message(DESCRIPTOR.message_types_by_name["InferTensorContents"])
ModelInferRequest = _message(DESCRIPTOR.message_types_by_name["ModelInferRequest"])
ModelInferResponse = _message(DESCRIPTOR.message_types_by_name["ModelInferResponse"])
ModelStreamInferResponse = _message(DESCRIPTOR.message_types_by_name["ModelStreamInferResponse"])
ModelConfigRequest = _message(DESCRIPTOR.message_types_by_name["ModelConfigRequest"])
ModelConfigResponse = _message(DESCRIPTOR.message_types_by_name["ModelConfigResponse"])
ModelStatisticsRequest = _message(DESCRIPTOR.message_types_by_name["ModelStatisticsRequest"])
StatisticDuration = _message(DESCRIPTOR.message_types_by_name["StatisticDuration"])
InferStatistics = _message(DESCRIPTOR.message_types_by_name["InferStatistics"])
InferResponseStatistics = _message(DESCRIPTOR.message_types_by_name["InferResponseStatistics"])
InferBatchStatistics = _message(DESCRIPTOR.message_types_by_name["InferBatchStatistics"])
MemoryUsage = _message(DESCRIPTOR.message_types_by_name["MemoryUsage"])
ModelStatistics = _message(DESCRIPTOR.message_types_by_name["ModelStatistics"])
ModelStatisticsResponse = _message(DESCRIPTOR.message_types_by_name["ModelStatisticsResponse"])
ModelRepositoryParameter = _message(DESCRIPTOR.message_types_by_name["ModelRepositoryParameter"])
RepositoryIndexRequest = _message(DESCRIPTOR.message_types_by_name["RepositoryIndexRequest"])
RepositoryIndexResponse = _message(DESCRIPTOR.message_types_by_name["RepositoryIndexResponse"])
RepositoryModelLoadRequest = _message(DESCRIPTOR.message_types_by_name["RepositoryModelLoadRequest"])
RepositoryModelLoadResponse = _message(DESCRIPTOR.message_types_by_name["RepositoryModelLoadResponse"])
RepositoryModelUnloadRequest = _message(DESCRIPTOR.message_types_by_name["RepositoryModelUnloadRequest"])
RepositoryModelUnloadResponse = _message(DESCRIPTOR.message_types_by_name["RepositoryModelUnloadResponse"])
ModelRateLimiter = _message(DESCRIPTOR.message_types_by_name["ModelRateLimiter"])
ModelInstanceGroup = _message(DESCRIPTOR.message_types_by_name["ModelInstanceGroup"])
ModelTensorReshape = _message(DESCRIPTOR.message_types_by_name["ModelTensorReshape"])
ModelInput = _message(DESCRIPTOR.message_types_by_name["ModelInput"])
ModelOutput = _message(DESCRIPTOR.message_types_by_name["ModelOutput"])
BatchInput = _message(DESCRIPTOR.message_types_by_name["BatchInput"])
BatchOutput = _message(DESCRIPTOR.message_types_by_name["BatchOutput"])
ModelVersionPolicy = _message(DESCRIPTOR.message_types_by_name["ModelVersionPolicy"])
ModelOptimizationPolicy = _message(DESCRIPTOR.message_types_by_name["ModelOptimizationPolicy"])
ModelQueuePolicy = _message(DESCRIPTOR.message_types_by_name["ModelQueuePolicy"])
ModelDynamicBatching = _message(DESCRIPTOR.message_types_by_name["ModelDynamicBatching"])
ModelSequenceBatching = _message(DESCRIPTOR.message_types_by_name["ModelSequenceBatching"])
ModelEnsembling = _message(DESCRIPTOR.message_types_by_name["ModelEnsembling"])
ModelParameter = _message(DESCRIPTOR.message_types_by_name["ModelParameter"])
ModelWarmup = _message(DESCRIPTOR.message_types_by_name["ModelWarmup"])
ModelOperations = _message(DESCRIPTOR.message_types_by_name["ModelOperations"])
ModelTransactionPolicy = _message(DESCRIPTOR.message_types_by_name["ModelTransactionPolicy"])
ModelRepositoryAgents = _message(DESCRIPTOR.message_types_by_name["ModelRepositoryAgents"])
ModelResponseCache = _message(DESCRIPTOR.message_types_by_name["ModelResponseCache"])
ModelMetrics = _message(DESCRIPTOR.message_types_by_name["ModelMetrics"])
ModelConfig = _message(DESCRIPTOR.message_types_by_name["ModelConfig"])
