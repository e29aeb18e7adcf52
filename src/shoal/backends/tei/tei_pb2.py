"""Made of tei.proto by protocol_compile.py: change that file, not this one."""

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
    b'\n\ttei.proto\x12\tshoal.tei"\r\n\x0bInfoRequest"\x88\x03\n\x0cInfoResponse\x12\x18\n\x07vers'
    b'ion\x18\x01 \x01(\tR\x07version\x12\x19\n\x08model_id\x18\x04 \x01(\tR\x07modelId\x12 \n\tmod'
    b'el_sha\x18\x05 \x01(\tH\x00R\x08modelSha\x88\x01\x01\x12\x1f\n\x0bmodel_dtype\x18\x06 \x01(\t'
    b'R\nmodelDtype\x123\n\nmodel_type\x18\x07 \x01(\x0e2\x14.shoal.tei.ModelTypeR\tmodelType\x126'
    b'\n\x17max_concurrent_requests\x18\x08 \x01(\rR\x15maxConcurrentRequests\x12(\n\x10max_input_l'
    b'ength\x18\t \x01(\rR\x0emaxInputLength\x12(\n\x10max_batch_tokens\x18\n \x01(\rR\x0emaxBatchT'
    b'okens\x121\n\x15max_client_batch_size\x18\x0c \x01(\rR\x12maxClientBatchSizeB\x0c\n\n_model_s'
    b'ha"1\n\x08Metadata\x12%\n\x0ecompute_tokens\x18\x02 \x01(\rR\rcomputeTokens"\xb0\x02\n\x0cEmb'
    b'edRequest\x12\x16\n\x06inputs\x18\x01 \x01(\tR\x06inputs\x12\x1a\n\x08truncate\x18\x02 \x01('
    b'\x08R\x08truncate\x12!\n\tnormalize\x18\x03 \x01(\x08H\x00R\tnormalize\x88\x01\x01\x12Q\n\x14'
    b'truncation_direction\x18\x04 \x01(\x0e2\x1e.shoal.tei.TruncationDirectionR\x13truncationDirec'
    b'tion\x12$\n\x0bprompt_name\x18\x05 \x01(\tH\x01R\npromptName\x88\x01\x01\x12#\n\ndimensions'
    b'\x18\x06 \x01(\rH\x02R\ndimensions\x88\x01\x01B\x0c\n\n_normalizeB\x0e\n\x0c_prompt_nameB\r\n'
    b'\x0b_dimensions"`\n\rEmbedResponse\x12\x1e\n\nembeddings\x18\x01 \x01(\x0cR\nembeddings\x12/'
    b'\n\x08metadata\x18\x02 \x01(\x0b2\x13.shoal.tei.MetadataR\x08metadata"\xd1\x01\n\x12EmbedSpar'
    b'seRequest\x12\x16\n\x06inputs\x18\x01 \x01(\tR\x06inputs\x12\x1a\n\x08truncate\x18\x02 \x01('
    b'\x08R\x08truncate\x12Q\n\x14truncation_direction\x18\x03 \x01(\x0e2\x1e.shoal.tei.TruncationD'
    b'irectionR\x13truncationDirection\x12$\n\x0bprompt_name\x18\x04 \x01(\tH\x00R\npromptName\x88'
    b'\x01\x01B\x0e\n\x0c_prompt_name"9\n\x0bSparseValue\x12\x14\n\x05index\x18\x01 \x01(\rR\x05ind'
    b'ex\x12\x14\n\x05value\x18\x02 \x01(\x02R\x05value"\x8b\x01\n\x13EmbedSparseResponse\x12C\n'
    b'\x11sparse_embeddings\x18\x01 \x03(\x0b2\x16.shoal.tei.SparseValueR\x10sparseEmbeddings\x12/'
    b'\n\x08metadata\x18\x02 \x01(\x0b2\x13.shoal.tei.MetadataR\x08metadata"\xce\x01\n\x0fEmbedAllR'
    b'equest\x12\x16\n\x06inputs\x18\x01 \x01(\tR\x06inputs\x12\x1a\n\x08truncate\x18\x02 \x01(\x08'
    b'R\x08truncate\x12Q\n\x14truncation_direction\x18\x03 \x01(\x0e2\x1e.shoal.tei.TruncationDirec'
    b'tionR\x13truncationDirection\x12$\n\x0bprompt_name\x18\x04 \x01(\tH\x00R\npromptName\x88\x01'
    b'\x01B\x0e\n\x0c_prompt_name"0\n\x0eTokenEmbedding\x12\x1e\n\nembeddings\x18\x01 \x01(\x0cR\ne'
    b'mbeddings"\x89\x01\n\x10EmbedAllResponse\x12D\n\x10token_embeddings\x18\x01 \x03(\x0b2\x19.sh'
    b'oal.tei.TokenEmbeddingR\x0ftokenEmbeddings\x12/\n\x08metadata\x18\x02 \x01(\x0b2\x13.shoal.te'
    b'i.MetadataR\x08metadata"\xba\x01\n\x12PredictPairRequest\x12\x16\n\x06inputs\x18\x01 \x03(\tR'
    b'\x06inputs\x12\x1a\n\x08truncate\x18\x02 \x01(\x08R\x08truncate\x12\x1d\n\nraw_scores\x18\x03'
    b' \x01(\x08R\trawScores\x12Q\n\x14truncation_direction\x18\x04 \x01(\x0e2\x1e.shoal.tei.Trunca'
    b'tionDirectionR\x13truncationDirection"8\n\nPrediction\x12\x14\n\x05score\x18\x01 \x01(\x02R'
    b'\x05score\x12\x14\n\x05label\x18\x02 \x01(\tR\x05label"{\n\x0fPredictResponse\x127\n\x0bpredi'
    b'ctions\x18\x01 \x03(\x0b2\x15.shoal.tei.PredictionR\x0bpredictions\x12/\n\x08metadata\x18\x02'
    b' \x01(\x0b2\x13.shoal.tei.MetadataR\x08metadata"\x8b\x01\n\rEncodeRequest\x12\x16\n\x06inputs'
    b'\x18\x01 \x01(\tR\x06inputs\x12,\n\x12add_special_tokens\x18\x02 \x01(\x08R\x10addSpecialToke'
    b'ns\x12$\n\x0bprompt_name\x18\x03 \x01(\tH\x00R\npromptName\x88\x01\x01B\x0e\n\x0c_prompt_name'
    b'"\x92\x01\n\x0bSimpleToken\x12\x0e\n\x02id\x18\x01 \x01(\rR\x02id\x12\x12\n\x04text\x18\x02 '
    b'\x01(\tR\x04text\x12\x18\n\x07special\x18\x03 \x01(\x08R\x07special\x12\x19\n\x05start\x18'
    b'\x04 \x01(\rH\x00R\x05start\x88\x01\x01\x12\x17\n\x04stop\x18\x05 \x01(\rH\x01R\x04stop\x88'
    b'\x01\x01B\x08\n\x06_startB\x07\n\x05_stop"@\n\x0eEncodeResponse\x12.\n\x06tokens\x18\x01 \x03'
    b'(\x0b2\x16.shoal.tei.SimpleTokenR\x06tokens"Q\n\rDecodeRequest\x12\x10\n\x03ids\x18\x01 \x03('
    b'\rR\x03ids\x12.\n\x13skip_special_tokens\x18\x02 \x01(\x08R\x11skipSpecialTokens"$\n\x0eDecod'
    b'eResponse\x12\x12\n\x04text\x18\x01 \x01(\tR\x04text".\n\x12HealthCheckRequest\x12\x18\n\x07s'
    b'ervice\x18\x01 \x01(\tR\x07service"\xac\x01\n\x13HealthCheckResponse\x12D\n\x06status\x18\x01'
    b' \x01(\x0e2,.shoal.tei.HealthCheckResponse.ServingStatusR\x06status"O\n\rServingStatus\x12'
    b'\x0b\n\x07UNKNOWN\x10\x00\x12\x0b\n\x07SERVING\x10\x01\x12\x0f\n\x0bNOT_SERVING\x10\x02\x12'
    b'\x13\n\x0fSERVICE_UNKNOWN\x10\x03*Y\n\tModelType\x12\x18\n\x14MODEL_TYPE_EMBEDDING\x10\x00'
    b'\x12\x19\n\x15MODEL_TYPE_CLASSIFIER\x10\x01\x12\x17\n\x13MODEL_TYPE_RERANKER\x10\x02*T\n\x13T'
    b'runcationDirection\x12\x1e\n\x1aTRUNCATION_DIRECTION_RIGHT\x10\x00\x12\x1d\n\x19TRUNCATION_DI'
    b'RECTION_LEFT\x10\x01b\x06proto3'
)


def _message(descriptor):
    made = message_factory.GetMessageClass(descriptor)
    for nested in descriptor.nested_types:  # protobuf's own Python implementation leaves them out
        if not hasattr(made, nested.name):
            setattr(made, nested.name, _message(nested))
    return made


ModelType = EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["ModelType"])
MODEL_TYPE_EMBEDDING = 0
MODEL_TYPE_CLASSIFIER = 1
MODEL_TYPE_RERANKER = 2
TruncationDirection = EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["TruncationDirection"])
TRUNCATION_DIRECTION_RIGHT = 0
TRUNCATION_DIRECTION_LEFT = 1
InfoRequest = _message(DESCRIPTOR.message_types_by_name["InfoRequest"])
InfoResponse = _message(DESCRIPTOR.message_types_by_name["InfoResponse"])
Metadata = _message(DESCRIPTOR.message_types_by_name["Metadata"])
EmbedRequest = _message(DESCRIPTOR.message_types_by_name["EmbedRequest"])
EmbedResponse = _message(DESCRIPTOR.message_types_by_name["EmbedResponse"])
EmbedSparseRequest = _message(DESCRIPTOR.message_types_by_name["EmbedSparseRequest"])
SparseValue = _message(DESCRIPTOR.message_types_by_name["SparseValue"])
EmbedSparseResponse = _message(DESCRIPTOR.message_types_by_name["EmbedSparseResponse"])
EmbedAllRequest = _message(DESCRIPTOR.message_types_by_name["EmbedAllRequest"])
TokenEmbedding = _message(DESCRIPTOR.message_types_by_name["TokenEmbedding"])
EmbedAllResponse = _message(DESCRIPTOR.message_types_by_name["EmbedAllResponse"])
PredictPairRequest = _message(DESCRIPTOR.message_types_by_name["PredictPairRequest"])
Prediction = _message(DESCRIPTOR.message_types_by_name["Prediction"])
PredictResponse = _message(DESCRIPTOR.message_types_by_name["PredictResponse"])
EncodeRequest = _message(DESCRIPTOR.message_types_by_name["EncodeRequest"])
SimpleToken = _message(DESCRIPTOR.message_types_by_name["SimpleToken"])
EncodeResponse = _message(DESCRIPTOR.message_types_by_name["EncodeResponse"])
DecodeRequest = _message(DESCRIPTOR.message_types_by_name["DecodeRequest"])
DecodeResponse = _message(DESCRIPTOR.message_types_by_name["DecodeResponse"])
HealthCheckRequest = _message(DESCRIPTOR.message_types_by_name["HealthCheckRequest"])
HealthCheckResponse = _message(DESCRIPTOR.message_types_by_name["HealthCheckResponse"])
