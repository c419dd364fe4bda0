-- Whether a saga has something to hear, or rolls back.
SELECT EXISTS (SELECT FROM rota.workflow_news n WHERE n.kind IN ('undo', 'free'))
    OR EXISTS (SELECT FROM rota.saga s WHERE s.state = 'rolling_back')
